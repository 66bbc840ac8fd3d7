# SPDX-License-Identifier: Apache-2.0
"""Hooks of the recorder that see what a script does without being told: a file a hook."""
