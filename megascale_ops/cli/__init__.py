# SPDX-License-Identifier: Apache-2.0
"""The command line: one verb per file, each of which imports its program only when it is called.

``main`` holds the table of verbs and turns every error of ours into one sentence and an exit code.
"""
