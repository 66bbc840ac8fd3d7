# SPDX-License-Identifier: Apache-2.0
"""The vocabulary: every message and record that two programs of ours exchange, as frozen structs.

Programs never import each other; they share only this room. Nothing here does anything: a struct, its units in the
names of its fields, and the version that travels with it.
"""
