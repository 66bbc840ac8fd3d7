# SPDX-License-Identifier: Apache-2.0
"""Collectives of all ranks compared: which rank comes late, which link is slow, what it costs."""
