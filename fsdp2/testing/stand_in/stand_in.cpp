// A device that computes like the CPU, has streams and events like a GPU, and checks their order.
//
//   operator on the device ──> clocks and accesses of the current stream ──> the CPU's kernel, at once
//
// Nothing runs behind the host's back, so results are right whatever is ordered. What is checked is in
// order.h.
#include <ATen/ATen.h>
#include <ATen/CPUFunctions.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <chrono>
#include <cstdlib>
#include <cstring>

#include "order.h"

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
const c10::Device kOnly(kDevice, 0);

// ---- memory

void free_block(void* address) {
  {
    std::lock_guard<std::mutex> lock(device().mutex);
    auto found = device().blocks.find(reinterpret_cast<uintptr_t>(address));
    if (found != device().blocks.end()) {
      join(device().released[found->second.stream], found->second.last);
      device().live -= static_cast<int64_t>(found->second.nbytes);
      device().blocks.erase(found);
    }
  }
  std::free(address);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &free_block, kOnly};
    // Aligned as the CPU's own memory is, for its kernels to sum in the same order.
    void* address = std::aligned_alloc(64, (nbytes + 63) / 64 * 64);
    std::memset(address, 0xff, nbytes);  // NaN in floats: what is read unwritten shows
    std::lock_guard<std::mutex> lock(device().mutex);
    Block block;
    block.nbytes = nbytes;
    block.stream = current_stream;
    block.after = device().released[current_stream];
    device().blocks[reinterpret_cast<uintptr_t>(address)] = block;
    device().live += static_cast<int64_t>(nbytes);
    device().peak = std::max(device().peak, device().live);
    return {address, address, &free_block, kOnly};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    std::memcpy(target, source, count);
  }
};

DeviceAllocator allocator;
REGISTER_ALLOCATOR(kDevice, &allocator)

void free_pinned(void* address) {
  {
    std::lock_guard<std::mutex> lock(device().mutex);
    device().pinned.erase(address);
  }
  std::free(address);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* address = std::malloc(std::max<size_t>(nbytes, 1));
    std::lock_guard<std::mutex> lock(device().mutex);
    device().pinned.insert(address);
    return {address, address, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    std::memcpy(target, source, count);
  }
};

PinnedAllocator pinned_allocator;

// ---- streams and events

// What was over when it was recorded, and when that was: all has run by then.
struct Event {
  Clock clock;
  std::chrono::steady_clock::time_point time;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return kOnly; }
  c10::Device getDevice() const override { return kOnly; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return make(); }
  c10::Stream getNewStream(c10::Device, int) const override { return make(); }
  c10::Stream exchangeStream(c10::Stream other) const override {
    const auto before = current_stream;
    current_stream = other.id();
    count("set stream");
    return stream(before);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    count("record");
    std::lock_guard<std::mutex> lock(device().mutex);
    TORCH_CHECK(device().has_streams, "this device has no events");
    if (*event == nullptr) *event = new Event;
    auto clock = device().clocks[stream.id()];
    join(clock, device().clocks[kHost]);
    *static_cast<Event*>(*event) = {clock, std::chrono::steady_clock::now()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    count("wait");
    if (event == nullptr) return;
    std::lock_guard<std::mutex> lock(device().mutex);
    join(device().clocks[stream.id()], static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void synchronizeEvent(void* event) const override {
    count("synchronize event");
    if (event == nullptr) return;
    std::lock_guard<std::mutex> lock(device().mutex);
    host_waits_for(static_cast<Event*>(event)->clock);
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    count("synchronize stream");
    std::lock_guard<std::mutex> lock(device().mutex);
    host_waits_for(device().clocks[stream.id()]);
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    count("synchronize device");
    std::lock_guard<std::mutex> lock(device().mutex);
    for (int64_t stream = 0; stream < device().streams; ++stream)
      host_waits_for(device().clocks[stream]);
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {
    count("record_stream");
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const auto passed = static_cast<Event*>(second)->time - static_cast<Event*>(first)->time;
    return std::chrono::duration<double, std::milli>(passed).count();
  }

 private:
  static c10::Stream stream(int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, kOnly, static_cast<c10::StreamId>(id));
  }
  static c10::Stream make() {
    std::lock_guard<std::mutex> lock(device().mutex);
    TORCH_CHECK(device().has_streams, "this device has no streams");
    return stream(device().streams++);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(device().mutex);
    return device().pinned.count(data) != 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Device getDeviceFromPtr(void*) const override { return kOnly; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    TORCH_CHECK(device().empties || nbytes >= storage.nbytes(), "storages cannot be emptied");
    auto memory = allocator.allocate(nbytes);
    if (nbytes && storage.nbytes())
      std::memcpy(memory.get(), storage.data(), std::min(nbytes, storage.nbytes()));
    auto* impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(std::move(memory));
    impl->set_nbytes(nbytes);
  }
};

const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// ---- operators

// The same memory as a CPU tensor.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
  const auto& storage = tensor.storage();
  c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(),
                    at::DataPtr(const_cast<void*>(storage.data()), c10::Device(c10::kCPU)),
                    nullptr, false);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(same), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                     tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    alias.unsafeGetTensorImpl()->set_wrapped_number(true);
  return alias;
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, strides, &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// A new tensor on the device with what the CPU computed.
at::Tensor on_device(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  auto found = empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), {}, {}, {});
  if (tensor.numel()) on_cpu(found).copy_(tensor);
  return found;
}

struct Seen {
  std::vector<at::Tensor> reads, writes;
  std::vector<std::pair<at::Tensor, at::Tensor>> outputs;  // empty ones, and what the CPU fills

  // An output without elements is for the operator to resize.
  at::Tensor target(const at::Tensor& tensor, bool writes_it) {
    if (!writes_it || !tensor.is_privateuseone() || tensor.numel()) return on_cpu(tensor);
    outputs.emplace_back(tensor, at::empty(tensor.sizes(), tensor.options().device(c10::kCPU)));
    return outputs.back().second;
  }
  void resize_outputs() {
    for (auto& [tensor, filled] : outputs) {
      if (tensor.sizes() == filled.sizes()) continue;
      tensor.resize_(filled.sizes());
      if (filled.numel()) on_cpu(tensor).copy_(filled);
    }
  }
  void add(const at::Tensor& tensor, bool writes_it) {
    if (tensor.defined() && tensor.is_privateuseone())
      (writes_it ? writes : reads).push_back(tensor);
  }
};

c10::IValue argument_on_cpu(const c10::IValue& value, bool writes, Seen& seen) {
  if (value.isTensor()) {
    seen.add(value.toTensor(), writes);
    return seen.target(value.toTensor(), writes);
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      seen.add(tensor, writes);
      list.push_back(seen.target(tensor, writes));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      if (tensor) seen.add(*tensor, writes);
      list.push_back(tensor ? std::make_optional(on_cpu(*tensor)) : std::nullopt);
    }
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == kDevice) return c10::Device(c10::kCPU);
  return value;
}

c10::IValue result_on_device(const c10::IValue& value, Seen& seen, bool& host_learns) {
  if (value.isTensor()) {
    auto found = on_device(value.toTensor());
    seen.add(found, true);
    return found;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      auto found = on_device(tensor);
      seen.add(found, true);
      list.push_back(found);
    }
    return list;
  }
  host_learns = true;
  return value;
}

// Every operator that has no kernel of its own below.
void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto arguments = torch::jit::pop(*stack, schema.arguments().size());
  torch::jit::Stack inner;
  Seen seen;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    inner.push_back(argument_on_cpu(arguments[i], alias && alias->isWrite(), seen));
  }
  op.callBoxed(&inner);
  seen.resize_outputs();
  bool host_learns = false;
  std::vector<c10::IValue> results;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const auto* alias = schema.returns()[i].alias_info();
    if (!alias) {
      results.push_back(result_on_device(inner[i], seen, host_learns));
      continue;
    }
    TORCH_CHECK(alias->isWrite(), op.operator_name(), " makes a view; give it a kernel");
    for (size_t j = 0; j < arguments.size(); ++j) {
      const auto* given = schema.arguments()[j].alias_info();
      if (given && given->beforeSets() == alias->beforeSets()) {
        results.push_back(arguments[j]);
        break;
      }
    }
  }
  TORCH_CHECK(results.size() == schema.returns().size(), op.operator_name(), ": lost a result");
  ran(schema.name(), seen.reads, seen.writes);
  if (host_learns) host_waits_for_current();
  for (auto& result : results) stack->push_back(std::move(result));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  on_cpu(target).copy_(on_cpu(self));
  ran("aten::copy_", {self}, {target});
  const auto& host = self.is_cpu() ? self : target;
  if (host.is_cpu() && !(non_blocking && host.is_pinned())) host_waits_for_current();
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  if (target.sizes() != self.sizes()) target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  ran("aten::_local_scalar_dense", {self}, {});
  host_waits_for_current();
  return on_cpu(self).item();
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset,
                        c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, storage, offset, size, stride);
}

at::Tensor& set_whole(at::Tensor& self, at::Storage storage) {
  const auto length = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_storage(self, storage, 0, {length}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}

void record_stream(at::Tensor&, at::Stream) { count("record_stream"); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  // Others would compute it from other operators, to other bits.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&run>());
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("resize_", TORCH_FN(at::native::resize_));
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("record_stream", &record_stream);
}

// ---- attention, in the CPU's one fused operator: no matrix of [queries, keys]

using Attended = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt,
                            at::Tensor, at::Tensor, at::Tensor>;

// One key and value head for each query head.
at::Tensor repeated(const at::Tensor& heads, const at::Tensor& query) {
  const auto times = query.size(1) / heads.size(1);
  return times == 1 ? heads : heads.repeat_interleave(times, 1);
}

// The sum over the query heads that shared one.
at::Tensor shared(const at::Tensor& grad, const at::Tensor& heads) {
  if (grad.size(1) == heads.size(1)) return grad;
  return grad.unflatten(1, {heads.size(1), -1}).sum(2);
}

Attended attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                const std::optional<at::Tensor>& bias, double dropout, bool causal, bool,
                std::optional<double> scale) {
  TORCH_CHECK(!bias, "the stand-in's attention takes no mask");
  const auto q = on_cpu(query);
  auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(
      q, repeated(on_cpu(key), q), repeated(on_cpu(value), q), dropout, causal, {}, scale);
  const auto result = on_device(out), logsumexp = on_device(sums);
  ran("attention", {query, key, value}, {result, logsumexp});
  const at::Tensor none;
  return {result, logsumexp, none, none, query.size(2), key.size(2), none, none, none};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attend_backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const at::Tensor&, std::array<bool, 4>, const at::Tensor& out,
    const at::Tensor& logsumexp, const at::Tensor&, const at::Tensor&, c10::SymInt, c10::SymInt,
    double dropout, bool causal, const at::Tensor&, const at::Tensor&,
    std::optional<double> scale) {
  const auto q = on_cpu(query), k = on_cpu(key), v = on_cpu(value);
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      on_cpu(grad), q, repeated(k, q), repeated(v, q), on_cpu(out), on_cpu(logsumexp), dropout,
      causal, {}, scale);
  const auto of_query = on_device(dq), of_key = on_device(shared(dk, k)),
             of_value = on_device(shared(dv, v));
  ran("attention backward", {grad, query, key, value, out, logsumexp},
      {of_query, of_key, of_value});
  return {of_query, of_key, of_value, at::Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_scaled_dot_product_fused_attention_overrideable", &attend);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attend_backward);
}

// ---- for Python

at::Tensor host_view(const at::Tensor& tensor) { return on_cpu(tensor); }

void accessed(c10::string_view what, const std::vector<at::Tensor>& reads,
              const std::vector<at::Tensor>& writes) {
  ran(std::string(what), reads, writes);
}

std::vector<std::string> races() {
  std::lock_guard<std::mutex> lock(device().mutex);
  auto found = std::move(device().races);
  device().races.clear();
  // A test that shows a race leaves none to those behind it.
  for (int64_t stream = 0; stream < device().streams; ++stream)
    host_waits_for(device().clocks[stream]);
  return found;
}

int64_t count_of(c10::string_view what) {
  std::lock_guard<std::mutex> lock(device().mutex);
  return device().counts[std::string(what)];
}

// As a device without streams, whose storages keep their memory until they go.
void take_away() {
  std::lock_guard<std::mutex> lock(device().mutex);
  device().has_streams = device().empties = false;
}

int64_t live_bytes() {
  std::lock_guard<std::mutex> lock(device().mutex);
  return device().live;
}

// The most since the last call.
int64_t peak_bytes() {
  std::lock_guard<std::mutex> lock(device().mutex);
  return std::exchange(device().peak, device().live);
}

TORCH_LIBRARY(stand_in, m) {
  m.def("host_view(Tensor tensor) -> Tensor", &host_view);
  m.def("accessed(str what, Tensor[] reads, Tensor[] writes) -> ()", &accessed);
  m.def("races() -> str[]", &races);
  m.def("count_of(str what) -> int", &count_of);
  m.def("take_away() -> ()", &take_away);
  m.def("live_bytes() -> int", &live_bytes);
  m.def("peak_bytes() -> int", &peak_bytes);
}

}  // namespace

namespace at::native {
int64_t our_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&,
                       double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::overrideable);
}
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &our_attention)
}  // namespace at::native
