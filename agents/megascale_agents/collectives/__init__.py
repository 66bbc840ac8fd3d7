# SPDX-License-Identifier: Apache-2.0
"""Collectives of the ranks on this node: read from black boxes, summed for metrics, sampled for heartbeats."""
