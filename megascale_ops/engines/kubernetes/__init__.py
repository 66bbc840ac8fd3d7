# SPDX-License-Identifier: Apache-2.0
"""Kubernetes: nodes are cordoned, tainted and given a condition by the API server."""
