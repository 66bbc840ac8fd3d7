# SPDX-License-Identifier: Apache-2.0
"""The controller's metrics: one page for Prometheus, samples of each job, targets for service discovery."""
