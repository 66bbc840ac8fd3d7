# SPDX-License-Identifier: Apache-2.0
"""What the controller asks of this node: evidence, signals, profiles, black boxes that are kept."""
