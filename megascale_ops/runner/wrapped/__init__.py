# SPDX-License-Identifier: Apache-2.0
"""What a run knows of ranks that a wrapped launcher has started, and that are no children of ours."""
