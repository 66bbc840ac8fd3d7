# SPDX-License-Identifier: Apache-2.0
"""``chaos``: break jobs on purpose. The verb, its trials one after the other, and the whole matrix in numbers."""
