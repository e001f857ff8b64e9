// SPDX-License-Identifier: Apache-2.0
//
// Proves that what a reply says is in the text, memory by kind included.
#include "client/cli/inspect.h"

#include "gmock/gmock.h"

namespace ctkvr::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Inspect, InfoShowsServerAndLimits) {
  v1::GetServerInfoReply info;
  info.mutable_header()->set_boot_id(0xabcdef);
  info.set_version("1.2.3");
  info.set_device("a device");
  info.set_draining(true);
  info.set_arena_bytes(3ull << 30);
  info.add_formats(v1::FORMAT_K8V4);
  info.add_formats(v1::FORMAT_F32);
  info.add_sources(v1::SOURCE_QUERY_CENTROIDS);
  info.mutable_limits()->set_token_limit_max(4194304);
  EXPECT_THAT(InfoText(info),
              AllOf(HasSubstr("1.2.3"), HasSubstr("0000000000abcdef"), HasSubstr("draining"), HasSubstr("3.0 GiB"),
                    HasSubstr("k8v4 f32"), HasSubstr("query_centroids"), HasSubstr("at most 4,194,304")));
}

TEST(Inspect, ListShowsOneLineASession) {
  EXPECT_EQ(SessionListText({}), "no sessions\n");
  std::vector<v1::ListSessionsReply::Entry> sessions(2);
  sessions[0].set_session_id("first");
  sessions[0].set_length_max(8192);
  sessions[1].set_session_id("second");
  sessions[1].set_held_bytes(1 << 20);
  EXPECT_THAT(SessionListText(sessions), AllOf(HasSubstr("first"), HasSubstr("8,192"), HasSubstr("1.0 MiB")));
}

TEST(Inspect, SessionShowsMemoryByKindAndLayers) {
  v1::SessionInfo session;
  session.set_session_id("s");
  session.mutable_options()->set_format(v1::FORMAT_K6V4);
  session.mutable_memory()->set_reserved_bytes(5000);
  session.mutable_memory()->set_page_bytes(1111);
  session.mutable_memory()->set_raw_bytes(2222);
  session.mutable_memory()->set_index_bytes(3333);
  session.mutable_memory()->set_state_bytes(4444);
  session.mutable_memory()->set_share_of_f32(0.176);
  v1::LayerInfo* layer = session.add_layers();
  layer->set_length(700);
  layer->mutable_selection()->set_source(v1::SOURCE_SKETCH);
  layer->mutable_codec()->set_key_row_bytes(66);
  session.add_layers()->set_absent(true);
  EXPECT_THAT(
      SessionText(session),
      AllOf(HasSubstr("session s"), HasSubstr("k6v4"), HasSubstr("5,000"), HasSubstr("1,111"), HasSubstr("2,222"),
            HasSubstr("3,333"), HasSubstr("4,444"), HasSubstr("17.6 %"), HasSubstr("sketch"), HasSubstr("66 B")));
  EXPECT_THAT(SessionText(session), HasSubstr("absent"));
}

}  // namespace
}  // namespace ctkvr::cli
