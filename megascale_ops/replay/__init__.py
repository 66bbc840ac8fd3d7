# SPDX-License-Identifier: Apache-2.0
"""Recordings of what a controller took in: cut out, made anonymous, made small, and replayed through a real one."""
