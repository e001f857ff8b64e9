// SPDX-License-Identifier: Apache-2.0
//
// Proves which texts count as a trace context, by the standard's own example and every way to spoil it.

#include "server/obs/trace_context.h"

#include <gtest/gtest.h>

#include <string>

namespace ctkvr::obs {
namespace {

// Of https://www.w3.org/TR/trace-context/, section 3.2.
const std::string kExample = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

TEST(TraceContextTest, TheStandardsExampleIsRead) {
  const auto context = ParseTraceparent(kExample);
  ASSERT_TRUE(context.has_value());
  EXPECT_EQ(context->TraceId(), "4bf92f3577b34da6a3ce929d0e0e4736");
  EXPECT_EQ(context->SpanId(), "00f067aa0ba902b7");
}

TEST(TraceContextTest, EveryOtherCharacterAtEveryPlaceIsRefused) {
  for (size_t at = 0; at < kExample.size(); ++at) {
    for (char c : {'g', 'F', ' ', '\n', '\0', '"', '-'}) {
      if (kExample[at] == c) continue;
      std::string text = kExample;
      text[at] = c;
      EXPECT_FALSE(ParseTraceparent(text).has_value()) << at << " " << static_cast<int>(c);
    }
  }
}

TEST(TraceContextTest, EveryOtherLengthIsRefused) {
  for (size_t length = 0; length < kExample.size(); ++length) {
    EXPECT_FALSE(ParseTraceparent(kExample.substr(0, length)).has_value()) << length;
  }
  EXPECT_FALSE(ParseTraceparent(kExample + "0").has_value());
  EXPECT_FALSE(ParseTraceparent(kExample + "-").has_value());
}

TEST(TraceContextTest, IdsOfZerosAreNone) {
  std::string text = kExample;
  text.replace(3, 32, std::string(32, '0'));
  EXPECT_FALSE(ParseTraceparent(text).has_value());
  text = kExample;
  text.replace(36, 16, std::string(16, '0'));
  EXPECT_FALSE(ParseTraceparent(text).has_value());
}

TEST(TraceContextTest, ALaterVersionIsReadAsFarAsItIsKnown) {
  std::string text = kExample;
  text.replace(0, 2, "01");
  EXPECT_EQ(ParseTraceparent(text), ParseTraceparent(kExample));
  EXPECT_EQ(ParseTraceparent(text + "-more"), ParseTraceparent(kExample));
  EXPECT_FALSE(ParseTraceparent(text + "more").has_value());
  text.replace(0, 2, "ff");
  EXPECT_FALSE(ParseTraceparent(text).has_value());
}

}  // namespace
}  // namespace ctkvr::obs
