# SPDX-License-Identifier: Apache-2.0
"""The nodes and ranks as heartbeats describe them."""
