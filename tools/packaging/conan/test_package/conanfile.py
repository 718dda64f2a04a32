"""Builds and runs the C++ and C consumers of tests/package over the Conan package."""

import os

from conan import ConanFile
from conan.tools.build import can_run
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain


class RaptTest(ConanFile):
    settings = "os", "arch", "compiler", "build_type"

    def requirements(self):
        self.requires(self.tested_reference_str)

    def layout(self):
        self.folders.root = os.path.join("..", "..", "..", "..")
        self.folders.source = os.path.join("tests", "package")
        self.folders.build = os.path.join("build", "conan")
        self.folders.generators = os.path.join(self.folders.build, "generators")

    def generate(self):
        CMakeDeps(self).generate()
        toolchain = CMakeToolchain(self)
        toolchain.user_presets_path = False  # a file for editors, next to the sources
        toolchain.generate()

    def build(self):
        expect_cuda = "RAPT_EXPECT_CUDA=1 " if self.dependencies["rapt"].options.with_cuda else ""
        for consumer in ("find_package", "find_package_c"):
            cmake = CMake(self)
            cmake.configure(build_script_folder=consumer, cli_args=["--fresh"])
            cmake.build()
            if can_run(self):
                self.run(expect_cuda + os.path.join(self.build_folder, "consumer"), env="conanrun")

    def test(self):
        pass
