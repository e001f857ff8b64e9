# SPDX-License-Identifier: Apache-2.0
"""What a selector of tokens does to a model's loss, measured: see tests/eval/README.md."""
