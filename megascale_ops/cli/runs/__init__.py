# SPDX-License-Identifier: Apache-2.0
"""Verbs about whole runs: `stop` ends one that lives, `compare` shows two side by side, `audit` lists who ordered what."""
