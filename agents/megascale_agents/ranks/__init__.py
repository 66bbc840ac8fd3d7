# SPDX-License-Identifier: Apache-2.0
"""The ranks on this node: found, watched, and their last words read."""
