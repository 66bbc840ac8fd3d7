# SPDX-License-Identifier: Apache-2.0
"""Restore: each byte of storage is read once, digested as it passes, and sent to the other ranks that need it."""
