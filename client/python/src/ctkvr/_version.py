# SPDX-License-Identifier: Apache-2.0
"""The version of the package: the project's, in CMakeLists.txt."""

__version__ = "0.1.0"
