# SPDX-License-Identifier: Apache-2.0
"""Ranks slower than their peers: their own work compared, kernels, send queues, losses."""
