# SPDX-License-Identifier: Apache-2.0
"""How ranks ended: what can be read from their ends alone."""
