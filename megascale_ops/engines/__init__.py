# SPDX-License-Identifier: Apache-2.0
"""What starts jobs on clusters and owns their nodes: asked and told by way of its own programs."""
