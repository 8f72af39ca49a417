//! The report of this machine's providers and devices.

mod support;

use hpp_backend::ProviderSource;
use hpp_schema::Provider;
use support::backend;

#[test]
fn the_report_always_has_the_host() {
    let report = backend().devices();
    println!("{report:#?}");
    assert!(report.library.to_string_lossy().contains("onnxruntime"), "{:?}", report.library);
    assert_eq!(report.version.split('.').count(), 3, "{}", report.version);
    assert!(report.threads >= 1);
    assert!(report.tried.last().is_some_and(|tried| tried.problem.is_none()));
    assert!(report.built_in.iter().any(|name| name == "CPUExecutionProvider"), "{:?}", report.built_in);
    let cpu = report.providers.iter().find(|provider| provider.provider == Provider::CPU).unwrap();
    assert_eq!((cpu.problem.as_ref(), &cpu.source), (None, &ProviderSource::BuiltIn));
    assert_eq!(cpu.devices.len(), 1);
}

#[test]
fn an_unusable_provider_has_a_problem() {
    for provider in backend().devices().providers {
        assert_eq!(provider.devices.is_empty(), provider.problem.is_some(), "{provider:?}");
    }
}
