# SPDX-License-Identifier: Apache-2.0
"""Phases and step numbers of the libraries that scripts train with, declared without a change to the script.

One file a library, all of the same shape: functions that take a module which the script has just imported, and
``HOOKS``, the table from module to function. ``watch`` puts them all in place.
"""
