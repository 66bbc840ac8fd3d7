# SPDX-License-Identifier: Apache-2.0
"""What is gathered about a rank when somebody asks why it stands still."""
