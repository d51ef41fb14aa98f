// What a GPU would have been free to reorder: clocks of streams, and accesses of memory.
//
// Each stream carries a vector clock: how far it is known to be behind each stream. Of each block of
// memory the device knows the last write and the reads since, and reports
//   - a read that is not behind the last write;
//   - a write that is not behind the last write and all reads since;
//   - an access that is not behind every access of every block that was freed, before this one was
//     allocated, to the same stream's pool: a caching allocator may have handed out that memory;
//   - memory that is used after its storage was resized to nothing.
// The host counts as a stream on which nothing runs: it is behind others where it blocks.
#pragma once

#include <ATen/ATen.h>

#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

using Clock = std::map<int64_t, uint64_t>;  // by stream; what is not in it is 0
constexpr int64_t kHost = -1;

void join(Clock& into, const Clock& other) {
  for (const auto& [stream, count] : other) {
    auto& mine = into[stream];
    mine = std::max(mine, count);
  }
}

// By stream: its last access, and what made it.
using Accesses = std::map<int64_t, std::pair<uint64_t, std::string>>;

void join(Accesses& into, const Accesses& other) {
  for (const auto& [stream, access] : other)
    if (into[stream].first < access.first) into[stream] = access;
}

struct Block {
  size_t nbytes = 0;
  int64_t stream = 0;                          // whose pool it is from
  Accesses after;                              // of blocks whose memory it may have
  std::pair<int64_t, uint64_t> write{0, 0};
  std::string writer;
  Accesses reads;                              // since the last write
  Accesses last;
};

struct Device {
  std::mutex mutex;
  std::map<uintptr_t, Block> blocks;           // by address
  std::map<int64_t, Clock> clocks;             // by stream, kHost included
  std::map<int64_t, Accesses> released;        // by pool: of what was freed to it
  std::set<const void*> pinned;
  std::vector<std::string> races;
  std::map<std::string, int64_t> counts;
  int64_t streams = 1;
  bool has_streams = true;  // and events
  bool empties = true;      // storages
  int64_t live = 0, peak = 0;                  // bytes
};

Device& device() {
  static auto* found = new Device;
  return *found;
}

thread_local int64_t current_stream = 0;

std::string at_stream(int64_t stream) { return "stream " + std::to_string(stream); }

void count(const std::string& what) {
  std::lock_guard<std::mutex> lock(device().mutex);
  ++device().counts[what];
}

void report(const std::string& what) { device().races.push_back(what); }

Block* block_of(const void* address) {
  auto& blocks = device().blocks;
  auto found = blocks.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (found == blocks.begin()) return nullptr;
  --found;
  const auto end = found->first + found->second.nbytes;
  return reinterpret_cast<uintptr_t>(address) < end ? &found->second : nullptr;
}

bool covers(const Clock& now, int64_t stream, uint64_t count) {
  auto found = now.find(stream);
  return count == 0 || (found != now.end() && found->second >= count);
}

void check_reuse(const std::string& op, const Clock& now, const Block& block) {
  for (const auto& [stream, access] : block.after)
    if (!covers(now, stream, access.first))
      report(op + " uses a block of " + std::to_string(block.nbytes) + " bytes whose memory " +
             access.second + " may still use on " + at_stream(stream));
}

void check(const std::string& op, int64_t stream, const Clock& now, Block& block, bool writes) {
  check_reuse(op, now, block);
  if (!covers(now, block.write.first, block.write.second))
    report(op + " on " + at_stream(stream) + (writes ? " writes" : " reads") + " what " +
           block.writer + " writes on " + at_stream(block.write.first));
  const auto count = now.at(stream);
  if (writes) {
    for (const auto& [reader, read] : block.reads)
      if (!covers(now, reader, read.first))
        report(op + " on " + at_stream(stream) + " writes what " + read.second + " reads on " +
               at_stream(reader));
    block.write = {stream, count};
    block.writer = op;
    block.reads.clear();
  } else {
    block.reads[stream] = {count, op};
  }
  block.last[stream] = {count, op};
}

const void* address_of(const at::Tensor& tensor, const std::string& op) {
  if (!tensor.defined() || !tensor.is_privateuseone() || tensor.numel() == 0) return nullptr;
  if (tensor.storage().nbytes() == 0) {
    report(op + " uses memory that was released");
    return nullptr;
  }
  return tensor.storage().data();
}

// One operation on the current stream.
void ran(const std::string& op, const std::vector<at::Tensor>& reads,
         const std::vector<at::Tensor>& writes) {
  std::lock_guard<std::mutex> lock(device().mutex);
  auto& clock = device().clocks[current_stream];
  join(clock, device().clocks[kHost]);
  ++clock[current_stream];
  std::set<Block*> written;
  for (const auto& tensor : writes)
    if (auto* block = block_of(address_of(tensor, op))) written.insert(block);
  for (const auto& tensor : reads)
    if (auto* block = block_of(address_of(tensor, op)))
      if (!written.count(block)) check(op, current_stream, clock, *block, false);
  for (auto* block : written) check(op, current_stream, clock, *block, true);
}

void host_waits_for(const Clock& clock) { join(device().clocks[kHost], clock); }

void host_waits_for_current() {
  std::lock_guard<std::mutex> lock(device().mutex);
  host_waits_for(device().clocks[current_stream]);
}

}  // namespace
