//! Processes of their own: for a memory that nothing else is in, and to be killed.

use std::path::{Path, PathBuf};
use std::process::{self, Command, Stdio};

use clap::{Args, ValueEnum};
use serde::de::DeserializeOwned;

use crate::{memory, open};

/// What this program is started with by itself.
#[derive(Args, Debug)]
pub(crate) struct Child {
    /// What to do
    #[arg(long, hide = true, value_enum, requires = "folder")]
    child: Option<Role>,

    /// Where files go
    #[arg(long, hide = true)]
    folder: Option<PathBuf>,
}

/// What a child does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Role {
    FillOurs,
    FillGovernor,
    Victim,
}

impl Child {
    /// Plays the role, if this is a child. Says whether it is.
    pub(crate) fn run(&self) -> bool {
        let (Some(role), Some(folder)) = (self.child, &self.folder) else {
            return false;
        };
        match role {
            Role::FillOurs => say(&memory::fill_ours(folder)),
            Role::FillGovernor => say(&memory::fill_governor()),
            Role::Victim => open::be_killed(folder),
        }
        true
    }
}

fn say<T: serde::Serialize>(found: &T) {
    println!("{}", serde_json::to_string(found).expect("numbers"));
}

/// This program in that role, its output piped.
pub(crate) fn spawn(role: Role, folder: &Path) -> process::Child {
    let program = std::env::current_exe().expect("this program");
    let value = role.to_possible_value().expect("a value");
    Command::new(program)
        .args(["--child", value.get_name(), "--folder"])
        .arg(folder)
        .stdout(Stdio::piped())
        .spawn()
        .expect("a process")
}

/// What a child found out.
pub(crate) fn ask<T: DeserializeOwned>(role: Role, folder: &Path) -> T {
    let output = spawn(role, folder).wait_with_output().expect("an output");
    assert!(output.status.success(), "{role:?}: {}", output.status);
    serde_json::from_slice(&output.stdout).expect("what it found")
}
