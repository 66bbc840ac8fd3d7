# SPDX-License-Identifier: Apache-2.0
"""MegaScale Ops: keep large training jobs alive, and say what broke, with evidence."""

__version__ = "0.1.0"
