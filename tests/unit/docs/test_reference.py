# SPDX-License-Identifier: Apache-2.0
"""The reference says all that the code says: it is made from the same tables, commands and structs."""

import html
import re
from importlib import import_module

import click
import megascale_docs.http_api
import megascale_docs.tables
import pytest
from megascale_docs.command_line import command_line
from megascale_docs.http_api import addresses, http_api
from megascale_docs.markdown import prose, table
from megascale_docs.node_checks import node_checks
from megascale_docs.python_api import python_api
from megascale_docs.reference import PAGES
from megascale_docs.repository import linked
from megascale_docs.settings import comments, configuration, policy
from megascale_docs.tables import ROOT, chaos, fault_classes, metrics, runbook_index

from megascale_ops.chaos.faults import BY_NAME
from megascale_ops.cli.config.configuration import SECTIONS
from megascale_ops.cli.config.settings import settings_of
from megascale_ops.cli.main import VERBS, program
from megascale_ops.controller.server.operations import NOT_PUBLIC
from megascale_ops.diagnostics.expected import models
from megascale_ops.diagnostics.figures import KINDS
from megascale_ops.diagnostics.table import modules
from megascale_ops.schema.fault_classes import FAULTS
from megascale_ops.schema.metrics import METRICS, Kind, Metric
from megascale_ops.schema.policy import SETTINGS, JobPolicy


def codes(page: str) -> set[str]:
    """Return what a page shows as code."""
    return {html.unescape(text) for text in re.findall(r"<code>(.*?)</code>", page)}


def shown_options(group: click.Group) -> set[str]:
    """Return every option that some help page shows."""
    found: set[str] = set()
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        found |= {max(one.opts, key=len) for one in command.params if isinstance(one, click.Option) and not one.hidden}
        if isinstance(command, click.Group):
            found |= shown_options(command)
    return found


def test_every_verb_and_option_is_told_of() -> None:
    """Of all verbs, also those behind a verb; what is hidden from ``--help`` is hidden here."""
    page = command_line()

    assert all(f"\n## megascale-ops {name}\n" in page for name in VERBS)
    assert "\n### megascale-ops policy set\n" in page
    assert not {one for one in shown_options(program) if one not in page} - {"--log-level", "--log-format"}
    assert "--logs-specs" not in page


def test_every_setting_is_told_of_with_a_reason() -> None:
    """Of each section; its variable stands beside it, and each has words of its own."""
    page = codes(configuration())
    for section, place in SECTIONS.items():
        for setting in settings_of(getattr(import_module(place.module), place.struct)):
            if setting.path[0] != "policy":
                assert {setting.name, f"MEGASCALE_{section}_{setting.name}".upper()} <= page
    assert {"--job", "--stop-grace"} <= page
    assert "| as in torchrun |" not in re.sub(r".*(rdzv|master|node_rank).*", "", configuration())


def test_every_setting_of_the_policy_is_told_of() -> None:
    """With its default and range."""
    page = policy()

    assert set(SETTINGS) <= codes(page)
    assert "| <code>frozen_grace_s</code> | <code>1.5</code> | 0 or more |" in page


def test_comments_of_a_struct_are_its_reasons() -> None:
    """Those above a field and the one behind it belong to it, and to no neighbour."""
    why = comments(JobPolicy)

    assert why["frozen_grace_s"].startswith("1.5 s: a debugger's")
    assert why["restarts_per_hour"] == "of all causes"
    assert why["max_restarts"] == "in all; -1: only the hourly budgets count"


def test_tables_are_whole() -> None:
    """Every metric, class of fault, fault that can be injected, alert."""
    assert set(METRICS) <= codes(metrics())
    assert set(FAULTS) <= codes(fault_classes())
    assert set(BY_NAME) <= codes(chaos())
    runbooks = {path.stem for path in (ROOT / "dashboards" / "runbooks").glob("*.md")}
    assert set(re.findall(r"\[(\w+)\]\(\1\.md\)", runbook_index())) == runbooks


def test_a_new_metric_is_told_of_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a row more in the table is a row more on the page; nothing in between has to be written anew."""
    new = Metric("megascale_new_total", "agent", Kind.COUNTER, "", "What was not there before.", ("node",))
    before = metrics()

    monkeypatch.setattr(megascale_docs.tables, "METRICS", {**METRICS, new.name: new})

    assert new.name not in before
    assert (
        "| <code>megascale_new_total</code> | counter | <code>node</code> | What was not there before. |" in metrics()
    )


def test_every_address_is_told_of() -> None:
    """With what a token must allow, the types that it takes and gives, and each type's fields."""
    page = http_api()

    assert {f"{one.method} {one.path}" for one in addresses()} - NOT_PUBLIC.keys() <= codes(page)
    (row,) = [line for line in page.splitlines() if line.startswith("| <code>DELETE /v1/hardware/{uuid}</code> |")]
    assert "| operate, everything |" in row
    assert "\n### JobStatus\n" in page
    assert "| <code>culprits</code> |" in page


def test_what_is_public_in_python_is_told_of() -> None:
    """The names of ``__all__``, and the recorder's methods."""
    page = python_api()
    for module in ("megascale_ops.client", "megascale_kernels", "megascale_ops.checkpoint"):
        names = set(import_module(module).__all__) - {"observers"}
        assert all(f"\n### {name}\n" in page for name in names), module

    assert all(f"#### Recorder.{name}" in page for name in ("step", "loss", "mesh", "phase"))
    assert "def newest(" in page
    assert "Recorder.attach" not in page


def test_every_page_has_one_heading_and_no_help_text_is_markup() -> None:
    """What a help text says in brackets, bars or angles stands there as it is."""
    for place, make in PAGES.items():
        text = re.sub(r"^```.*?^```$", "", make(), flags=re.MULTILINE | re.DOTALL)
        assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1, place

    assert prose("N|MIN:MAX [1] <a> `x|y` _z_") == "N&#124;MIN:MAX \\[1\\] &lt;a&gt; <code>x&#124;y</code> \\_z\\_"
    assert table(("a", "b"), [("1\n2", "3")]) == "| a | b |\n| --- | --- |\n| 1 2 | 3 |\n"


@pytest.mark.parametrize(
    ("link", "on_site"),
    [
        ("[a](../../kernels/README.md#x)", "[a](../design/kernels.md#x)"),
        ("[a](../../dashboards/runbooks/AgentDown.md)", "[a](../runbooks/AgentDown.md)"),
        ("![a](../../docs/page.png)", "![a](../page.png)"),
        ("[a](../../README.md)", "[a](../index.md)"),
        ("[a](../../benchmarks/results/agent.txt)", "[a](../results/benchmarks/results/agent.txt)"),
        ("[a](../../Makefile)", "a"),
        ("[a](../../no-such-file.md)", "[a](../../no-such-file.md)"),
        ("[a](https://example.org/b)", "[a](https://example.org/b)"),
        ("```\n[a](../../Makefile)\n```", "```\n[a](../../Makefile)\n```"),
    ],
)
def test_links_into_the_repository_lead_to_pages(link: str, on_site: str) -> None:
    """A page of the site for each file that is one; a source file is named only; code and other hosts stay."""
    assert linked(link, ROOT / "docs" / "how-to" / "x.md", "how-to/x.md") == on_site


def test_every_check_of_a_node_and_every_expected_figure_is_on_its_page() -> None:
    """With its deadlines, its bar, its source: a new check or a new model is there by itself."""
    text = node_checks()

    assert not [name for name in modules() if f"| <code>{name}</code> |" not in text]
    assert not [kind.name for kind in KINDS.values() if kind.bar and f"<code>{kind.name}</code>" not in text]
    assert not [model.title for model in models() if f"| {model.title} |" not in text]
    assert "| H100 SXM | <code>all_reduce</code>, 8 GPUs | 479 GB/s | 383 GB/s | Azure AI-" in text
