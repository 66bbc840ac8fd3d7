# SPDX-License-Identifier: Apache-2.0
"""One function for each state in which a round lives, which looks whether the state can be left."""
