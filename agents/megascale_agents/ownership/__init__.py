# SPDX-License-Identifier: Apache-2.0
"""The owner of a job, and his rights: the agent does nothing for a job that its owner could not do himself."""
