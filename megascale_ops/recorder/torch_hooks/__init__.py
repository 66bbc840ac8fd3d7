# SPDX-License-Identifier: Apache-2.0
"""Hooks of the recorder that see what a script does without an edit: a file a hook."""
