# SPDX-License-Identifier: Apache-2.0
"""The controller's HTTP side: who is let in, and for what."""
