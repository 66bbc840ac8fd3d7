# SPDX-License-Identifier: Apache-2.0
"""What stands between the terminal and the verbs: options, what verbs print on, logs, Ctrl-C."""
