// What C++ asks of CUDA, answered without CUDA, in a CPU build of torch: how many devices there are, which one is current
// in this thread, and the one stream of each. Tensors on "cuda:i" are then fake tensors, whose results come from meta
// functions; autograd's engine runs their backward pass in one thread per device, as it does on a real machine.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

DeviceIndex device_count = 8;
thread_local DeviceIndex current_device = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Stream stream_of(Device device) {
    return Stream(Stream::DEFAULT, Device(DeviceType::CUDA, device.has_index() ? device.index() : current_device));
  }
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return Device(DeviceType::CUDA, current_device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return device_count; }
  Stream getStream(Device device) const override { return stream_of(device); }
  Stream getDefaultStream(Device device) const override { return stream_of(device); }
  Stream getNewStream(Device device, int) const override { return stream_of(device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return stream_of(device); }
  Stream exchangeStream(Stream stream) const override { return stream_of(stream.device()); }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace

// For Python, by ctypes.
extern "C" int rehearsal_current_device() { return current_device; }
extern "C" void rehearsal_set_device(int index) { current_device = static_cast<DeviceIndex>(index); }

namespace at {

struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return device_count; }
  DeviceIndex current_device() const override { return ::current_device; }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
  int getNumGPUs() const override { return device_count; }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at
