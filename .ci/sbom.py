# SPDX-License-Identifier: Apache-2.0
"""Write a bill of materials: what a user installs with us, as CycloneDX 1.6. Part of a release.

    python .ci/sbom.py dist/megascale-ops.cdx.json

The versions are those of this environment, which the tests ran with. What only develops or tests us is left out.
"""

import sys
from pathlib import Path

import installed
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

from megascale_ops.whole_file import write_whole


def bill() -> Bom:
    """Our package, what it needs with all extras for users, and who needs whom."""
    distributions = installed.distributions()
    needed = installed.needed(distributions)
    components = {}
    for name in needed:
        one = distributions[name]
        expression = installed.licence_of(one)
        components[name] = Component(
            name=name,
            version=one.version,
            type=ComponentType.APPLICATION if name == installed.OURS else ComponentType.LIBRARY,
            purl=PackageURL("pypi", None, name, one.version),
            bom_ref=f"{name}@{one.version}",
            licenses=[LicenseExpression(expression)] if expression else [],
        )
    bom = Bom(components=[part for name, part in components.items() if name != installed.OURS])
    bom.metadata.component = components[installed.OURS]
    for name, needs in needed.items():
        bom.register_dependency(components[name], [components[other] for other in needs if other in components])
    return bom


def written(bom: Bom) -> str:
    """The bill as JSON, valid by the schema.

    Raises:
        ValueError: it is not.
    """
    text = JsonV1Dot6(bom).output_as_string(indent=2)
    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if problem is not None:
        raise ValueError(f"the bill of materials is not valid: {str(problem)[:500]}")
    return f"{text}\n"


def main(target: Path) -> None:
    """Write it whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    bom = bill()
    write_whole(target, written(bom).encode())
    sys.stdout.write(f"{target}: {len(bom.components)} components\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
