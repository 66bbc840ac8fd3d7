# SPDX-License-Identifier: Apache-2.0
"""What makes the documentation site out of the repository: the reference from code, and pages that lie elsewhere."""
