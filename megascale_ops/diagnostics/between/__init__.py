# SPDX-License-Identifier: Apache-2.0
"""What is between nodes: pairs of them are measured over TCP, in rounds that ``pairs`` chooses."""
