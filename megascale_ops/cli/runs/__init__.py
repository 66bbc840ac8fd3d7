# SPDX-License-Identifier: Apache-2.0
"""Verbs about whole runs: `stop` ends one, `compare` shows two side by side, `audit` lists who ordered what."""
