# SPDX-License-Identifier: Apache-2.0
"""Collectives of all ranks compared: who comes late, which link is slow, what it costs."""
