# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops submit``: jobs that are handed in to the engine that owns the nodes."""
