# SPDX-License-Identifier: Apache-2.0
"""Where checkpoints lie besides a shared folder: on the nodes, with a copy on a buddy, and in object stores."""
