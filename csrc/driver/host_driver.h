// For the tests of the host driver; all other code uses make_host_driver of driver.h.
#pragma once

#include <memory>

#include "driver/driver.h"
#include "driver/host_map_limit.h"

namespace vtensor {

// `limit` must live as long as the driver.
std::unique_ptr<Driver> make_host_driver(const HostOptions& options, MapLimit& limit);

}  // namespace vtensor
