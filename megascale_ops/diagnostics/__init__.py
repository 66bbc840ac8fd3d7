# SPDX-License-Identifier: Apache-2.0
"""Is this node good: a self-check that measures, judged against the node's own equals, the fleet and its model."""
