# SPDX-License-Identifier: Apache-2.0
"""The runner: wrap a training launch, start its ranks through torch elastic, execute the controller's orders."""
