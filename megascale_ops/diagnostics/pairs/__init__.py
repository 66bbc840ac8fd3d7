# SPDX-License-Identifier: Apache-2.0
"""Which pairs of nodes to measure so that bad nodes and bad links are named in few rounds; pure."""
