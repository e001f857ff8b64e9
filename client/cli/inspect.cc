// SPDX-License-Identifier: Apache-2.0
#include "client/cli/inspect.h"

#include <fmt/format.h>

#include "client/cli/output.h"
#include "client/cli/selection_flags.h"

namespace ctkvr::cli {
namespace {

std::string FormatNames(const v1::GetServerInfoReply& info) {
  std::string out;
  for (const int format : info.formats()) out += (out.empty() ? "" : " ") + ShortName(static_cast<v1::Format>(format));
  return out;
}

std::string SourceNames(const v1::GetServerInfoReply& info) {
  std::string out;
  for (const int source : info.sources()) out += (out.empty() ? "" : " ") + ShortName(static_cast<v1::Source>(source));
  return out;
}

std::string MemoryText(const v1::SessionMemory& memory) {
  Table table({"memory", "bytes", ""});
  const auto add = [&table](const char* name, uint64_t bytes) {
    table.Add({name, Count(bytes), Bytes(static_cast<double>(bytes))});
  };
  add("reserved for the token limit", memory.reserved_bytes());
  add("held", memory.held_bytes());
  add("  pages: coded keys and values", memory.page_bytes());
  add("  raw: keys not coded yet", memory.raw_bytes());
  add("  index: centroids and lists", memory.index_bytes());
  add("  state: means, rotation", memory.state_bytes());
  return table.ToString() + fmt::format("{:.1f} bytes a token and KV head; held is {} of the same in f32\n",
                                        memory.bytes_per_token_head(), Percent(memory.share_of_f32()));
}

}  // namespace

std::string InfoText(const v1::GetServerInfoReply& info) {
  const v1::ServerLimits& limits = info.limits();
  Table table({"server", info.version()}, Align::kLeft);
  table.Add({"boot id", fmt::format("{:016x}", info.header().boot_id())});
  table.Add({"state", info.draining() ? "draining" : "serving"});
  table.Add({"backend", info.backend()});
  table.Add({"device", info.device()});
  table.Add({"lanes", std::to_string(info.lanes())});
  table.Add({"arena", Bytes(static_cast<double>(info.arena_bytes()))});
  table.Add({"arena free", Bytes(static_cast<double>(info.arena_free_bytes()))});
  table.Add({"formats", FormatNames(info)});
  table.Add({"sources", SourceNames(info)});
  table.Add({"head_dim", fmt::format("{} to {}, multiples of {}", limits.head_dim_min(), limits.head_dim_max(),
                                     limits.head_dim_multiple())});
  table.Add({"tokens a layer", "at most " + Count(limits.token_limit_max())});
  table.Add({"k", "at most " + Count(limits.k_tokens_max())});
  table.Add({"message", "at most " + Bytes(static_cast<double>(limits.message_bytes_max()))});
  table.Add({"lease", fmt::format("{} to {} s, {} s unless asked otherwise", limits.lease_seconds_min(),
                                  limits.lease_seconds_max(), limits.lease_seconds_default())});
  return table.ToString();
}

std::string SessionListText(const std::vector<v1::ListSessionsReply::Entry>& sessions) {
  if (sessions.empty()) return "no sessions\n";
  Table table({"session", "epoch", "tokens", "limit", "held", "reserved", "lease s"});
  for (const auto& entry : sessions) {
    table.Add({entry.session_id(), fmt::format("{:x}", entry.epoch()), Count(entry.length_max()),
               Count(entry.token_limit()), Bytes(static_cast<double>(entry.held_bytes())),
               Bytes(static_cast<double>(entry.reserved_bytes())), Count(entry.lease_remaining_seconds())});
  }
  return table.ToString();
}

std::string SessionText(const v1::SessionInfo& session) {
  const v1::Geometry& geometry = session.options().geometry();
  std::string out = fmt::format("session {}, epoch {:x}\n", session.session_id(), session.epoch());
  out += fmt::format("{} layers, {} query heads, {} KV heads, head_dim {}, value_dim {}, format {}\n",
                     geometry.layers(), geometry.q_heads(), geometry.kv_heads(), geometry.head_dim(),
                     geometry.value_dim(), ShortName(session.options().format()));
  out += fmt::format("{} tokens appended, {} retrievals, lease {} s\n\n", Count(session.appended_tokens()),
                     Count(session.retrievals()), session.lease_remaining_seconds());
  out += MemoryText(session.memory()) + "\n";
  Table table({"layer", "tokens", "indexed", "centroids", "source", "k", "key row", "value row", "generation"});
  for (const v1::LayerInfo& layer : session.layers()) {
    if (layer.absent()) {
      table.Add({std::to_string(layer.layer()), "absent"});
      continue;
    }
    table.Add({std::to_string(layer.layer()), Count(layer.length()), Count(layer.indexed_length()),
               Count(layer.query_centroids()), ShortName(layer.selection().source()),
               Count(layer.selection().k_tokens()), fmt::format("{} B", layer.codec().key_row_bytes()),
               fmt::format("{} B", layer.codec().value_row_bytes()), std::to_string(layer.codec().code_generation())});
  }
  return out + table.ToString();
}

}  // namespace ctkvr::cli
