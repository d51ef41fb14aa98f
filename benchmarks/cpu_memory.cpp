// torch's allocator of CPU memory, counted: every allocation and release, of all threads.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace {

std::mutex mutex;
std::unordered_map<void*, int64_t> sizes;
int64_t live = 0;
int64_t peak = 0;

c10::Allocator& theirs() { return *c10::GetDefaultCPUAllocator(); }

void release(void* memory) {
  if (memory == nullptr) {
    return;
  }
  {
    const std::lock_guard<std::mutex> guard(mutex);
    const auto found = sizes.find(memory);
    live -= found->second;
    sizes.erase(found);
  }
  theirs().raw_deallocate(memory);
}

struct Counting final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* memory = theirs().raw_allocate(nbytes);
    if (memory != nullptr) {
      const std::lock_guard<std::mutex> guard(mutex);
      sizes[memory] = static_cast<int64_t>(nbytes);
      live += static_cast<int64_t>(nbytes);
      peak = std::max(peak, live);
    }
    return {memory, memory, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* target, const void* source, std::size_t count) const override {
    default_copy_data(target, source, count);
  }
};

}  // namespace

extern "C" {

void fsdp2_count() { c10::SetCPUAllocator(new Counting, 1); }

int64_t fsdp2_peak() {
  const std::lock_guard<std::mutex> guard(mutex);
  const int64_t found = peak;
  peak = live;
  return found;
}
}
