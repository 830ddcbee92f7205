// SPDX-License-Identifier: Apache-2.0
#include "twell/dist/rank_identity.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "twell/base/error.h"

namespace twell {
namespace {

using Variables = std::map<std::string, std::string>;

std::optional<RankIdentity> read(const Variables& variables) {
  return rank_identity([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

std::string refusal(const Variables& variables) {
  try {
    read(variables);
  } catch (const InputError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(RankIdentity, NoLauncherNoIdentity) {
  EXPECT_FALSE(read({}).has_value());
  // A batch script of Slurm's that runs the command without srun.
  EXPECT_FALSE(read({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}}).has_value());
}

TEST(RankIdentity, TorchrunsStoreKeepsItsPort) {
  const auto identity = read({{"RANK", "9"},
                              {"WORLD_SIZE", "16"},
                              {"LOCAL_RANK", "1"},
                              {"LOCAL_WORLD_SIZE", "8"},
                              {"MASTER_ADDR", "node0"},
                              {"MASTER_PORT", "29500"},
                              {"TORCHELASTIC_RUN_ID", "abc"}});
  ASSERT_TRUE(identity.has_value());
  EXPECT_EQ(identity->rank, 9);
  EXPECT_EQ(identity->size, 16);
  EXPECT_EQ(identity->local_rank, 1);
  EXPECT_EQ(identity->local_size, 8);
  EXPECT_EQ(identity->host, "node0");
  EXPECT_EQ(identity->port, 29501);
  EXPECT_GT(identity->ports, 1);
}

TEST(RankIdentity, NoPortBeyondTheLast) {
  Variables variables = {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "65530"}};
  EXPECT_EQ(read(variables)->port, 65530);
  EXPECT_EQ(read(variables)->ports, 6);
  variables["MASTER_PORT"] = "65535";
  EXPECT_EQ(read(variables)->ports, 1);
  variables["TORCHELASTIC_RUN_ID"] = "abc";
  EXPECT_THAT(refusal(variables), testing::HasSubstr("MASTER_PORT 65535"));
}

// The command that starts a rank per GPU listens before they start, so that its port is the only
// one.
TEST(RankIdentity, AListenerThatIsThereHasOnePort) {
  Variables variables = {
      {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "29500"}, {"TWELL_LISTENER", "5"}};
  EXPECT_EQ(read(variables)->port, 29500);
  EXPECT_EQ(read(variables)->ports, 1);
  EXPECT_EQ(read(variables)->listener, 5);
  variables["RANK"] = "1";
  EXPECT_EQ(read(variables)->ports, 1);
  EXPECT_LT(read(variables)->listener, 0);
}

TEST(RankIdentity, SlurmNamesTheFirstNode) {
  Variables variables = {{"SLURM_PROCID", "3"},
                         {"SLURM_STEP_NUM_TASKS", "4"},
                         {"SLURM_LOCALID", "1"},
                         {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"},
                         {"SLURM_JOB_ID", "77"},
                         {"SLURM_STEP_ID", "0"},
                         {"SLURM_STEP_NODELIST", "gpu[03-04]"}};
  const auto identity = read(variables);
  ASSERT_TRUE(identity.has_value());
  EXPECT_EQ(identity->rank, 3);
  EXPECT_EQ(identity->size, 4);
  EXPECT_EQ(identity->local_size, 2);
  EXPECT_EQ(identity->host, "gpu03");
  EXPECT_GE(identity->port, 20000);
  // A rank of the job's former start does not join its next one.
  variables["SLURM_RESTART_COUNT"] = "1";
  EXPECT_NE(read(variables)->job, identity->job);
  variables.insert_or_assign("SLURM_STEP_NODELIST", std::string("a1,b2"));
  EXPECT_EQ(read(variables)->host, "a1");
  variables.insert_or_assign("SLURM_STEP_NODELIST", std::string("login"));
  variables.insert_or_assign("MASTER_PORT", std::string("4000"));
  EXPECT_EQ(read(variables)->host, "login");
  EXPECT_EQ(read(variables)->port, 4000);
}

TEST(RankIdentity, SlurmsListsAreReadWhole) {
  Variables variables = {{"SLURM_PROCID", "9"},  {"SLURM_STEP_NUM_TASKS", "10"},
                         {"SLURM_LOCALID", "0"}, {"SLURM_STEP_TASKS_PER_NODE", "4(x2),2"},
                         {"SLURM_NODEID", "2"},  {"SLURM_STEP_NODELIST", "rack[1-2]n[07,09]-ib,x"}};
  EXPECT_EQ(read(variables)->host, "rack1n07-ib");
  EXPECT_EQ(read(variables)->local_size, 2);
  variables.insert_or_assign("SLURM_NODEID", std::string("1"));
  EXPECT_EQ(read(variables)->local_size, 4);
  variables.insert_or_assign("SLURM_NODEID", std::string("3"));
  EXPECT_THAT(refusal(variables), testing::HasSubstr("4(x2),2"));
  variables.insert_or_assign("SLURM_STEP_TASKS_PER_NODE", std::string("many"));
  EXPECT_THAT(refusal(variables), testing::HasSubstr("got 'many'"));
}

TEST(RankIdentity, AnInterfaceCanBeNamed) {
  Variables variables = {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "4000"}};
  EXPECT_EQ(read(variables)->interface, "");
  variables["GLOO_SOCKET_IFNAME"] = "ib0";
  EXPECT_EQ(read(variables)->interface, "ib0");
  // Jobs without a name differ by their port.
  const std::string job = read(variables)->job;
  variables["MASTER_PORT"] = "4001";
  EXPECT_NE(read(variables)->job, job);
}

TEST(RankIdentity, AnAddressMayStandInBrackets) {
  Variables variables = {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "4000"}};
  for (const char* address : {"[fd77::1]", "fd77::1"}) {
    variables["MASTER_ADDR"] = address;
    EXPECT_EQ(read(variables)->host, "fd77::1");
  }
}

TEST(RankIdentity, OpenMpiNeedsAHostForSeveralMachines) {
  Variables variables = {{"OMPI_COMM_WORLD_RANK", "1"},
                         {"OMPI_COMM_WORLD_SIZE", "2"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                         {"PMIX_NAMESPACE", "prterun-5"}};
  EXPECT_EQ(read(variables)->host, "127.0.0.1");
  variables.insert_or_assign("OMPI_COMM_WORLD_LOCAL_SIZE", std::string("1"));
  EXPECT_THAT(refusal(variables), testing::HasSubstr("MASTER_ADDR"));
  variables.insert_or_assign("MASTER_ADDR", std::string("10.0.0.1"));
  EXPECT_EQ(read(variables)->host, "10.0.0.1");
}

TEST(RankIdentity, ContradictionsAreRefused) {
  EXPECT_THAT(refusal({{"RANK", "2"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "1"}}),
              testing::HasSubstr("rank 2"));
  EXPECT_THAT(refusal({{"RANK", "x"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "1"}}),
              testing::HasSubstr("RANK must be a number"));
  EXPECT_THAT(refusal({{"RANK", "0x"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "1"}}),
              testing::HasSubstr("got '0x'"));
  EXPECT_THAT(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}}), testing::HasSubstr("MASTER_PORT"));
}

}  // namespace
}  // namespace twell
