# SPDX-License-Identifier: Apache-2.0
"""The reference: which pages are made from code, and by what. ``docs/reference.py DIR`` writes them into a folder."""

from collections.abc import Callable

from megascale_docs.command_line import command_line
from megascale_docs.http_api import http_api
from megascale_docs.node_checks import node_checks
from megascale_docs.python_api import python_api
from megascale_docs.settings import configuration, policy
from megascale_docs.tables import chaos, fault_classes, metrics, runbook_index

PAGES: dict[str, Callable[[], str]] = {
    "reference/command-line.md": command_line,
    "reference/configuration.md": configuration,
    "reference/policy.md": policy,
    "reference/fault-classes.md": fault_classes,
    "reference/faults-to-inject.md": chaos,
    "reference/metrics.md": metrics,
    "reference/node-checks.md": node_checks,
    "reference/http-api.md": http_api,
    "reference/python-api.md": python_api,
    "runbooks/index.md": runbook_index,
}
