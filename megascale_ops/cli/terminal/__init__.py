# SPDX-License-Identifier: Apache-2.0
"""What stands between the terminal and the verbs: options that are taken over from other launchers."""
