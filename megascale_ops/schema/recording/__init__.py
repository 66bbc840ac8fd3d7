# SPDX-License-Identifier: Apache-2.0
"""Recordings: what a controller took in, as a file."""
