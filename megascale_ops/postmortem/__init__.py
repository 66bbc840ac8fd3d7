# SPDX-License-Identifier: Apache-2.0
"""What a job left that no program of ours watched: logs, stacks and flight recorder dumps, read and judged."""
