# SPDX-License-Identifier: Apache-2.0
"""The agent's own port: what Prometheus scrapes, and how a request reaches it."""
