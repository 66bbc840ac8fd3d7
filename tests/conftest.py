# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests."""

from hypothesis import settings

# A test never asserts speed; an example that takes more than 0.2 s on a machine with other work would be a failure.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
